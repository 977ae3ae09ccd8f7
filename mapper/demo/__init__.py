"""The demo's pair of models: a large one out of a package and a small one pruned and healed from it."""
