"""What things cost here, against others, both sides in one run."""
