"""Modules that several parts of the book use: studies, drawings, tables, counts of compiled
code."""
