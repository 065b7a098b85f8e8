"""The operators that graphs call at sites."""
