"""Lessons: one idea a file, on the published form."""
