"""Number formats, rounding, and the random bits it draws."""
