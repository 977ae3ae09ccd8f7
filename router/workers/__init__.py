"""The fleet: clients, health, breakers and the choice of a worker for a session."""
