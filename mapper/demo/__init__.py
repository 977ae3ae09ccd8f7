"""The demo's pair of models: a large one out of a package and a small one pruned and healed from it."""


def model_name(tier: str) -> str:
    """Under which name a worker serves the tier's model."""
    return f"smollm2-135m-{tier}"
