"""What is measured at every step, and the alarm."""
