"""Trainers: one file for each, imported by those who use it. Nothing here is imported by `import dpquant_compile`."""
