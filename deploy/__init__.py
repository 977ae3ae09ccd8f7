"""Ways to run Baton: one machine, containers, Kubernetes."""
