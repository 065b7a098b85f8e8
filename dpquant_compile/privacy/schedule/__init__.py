"""Which sites are low in an epoch, chosen by private measurements."""
