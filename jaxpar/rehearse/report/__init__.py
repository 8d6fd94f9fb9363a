"""The report of a rehearsal: its schema, memory, collectives, findings, tables and trace.

Its rooms, in the order in which they are read: the schema (`schema`, with a graph's in
`task_graph`); what is found, which is `memory`, what is in it at each time (`alive`),
`collectives`, `kernels` and the findings (`lint`); and how it is shown, as `report_tables`, as a
`trace` and as the `comparison` of two.
"""
