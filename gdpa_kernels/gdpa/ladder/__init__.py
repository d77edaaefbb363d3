"""Lessons beside products of the same name: one idea each, on the published form."""
