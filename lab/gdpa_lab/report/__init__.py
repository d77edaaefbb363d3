"""From records to tables, figures and sentences."""
