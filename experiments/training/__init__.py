"""Shared code of all training programs: configuration, loop, resume, memory checks."""
