"""Turns records into tables, figures and sentences."""
