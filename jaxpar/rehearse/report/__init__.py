"""The report of a rehearsal: its schema, tables, findings, comparison and page."""
