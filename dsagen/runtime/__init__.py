"""Loading and launching: torch and cuda-python enter here."""
