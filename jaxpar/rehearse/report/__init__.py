"""The report of a rehearsal: its schema, memory, collectives, findings, tables and trace."""
