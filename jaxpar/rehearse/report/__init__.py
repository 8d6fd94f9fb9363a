"""The report of a rehearsal: its schema, memory, collectives, findings, tables and trace.

Its rooms, in the order in which they are read: the schema (`schema`, with a graph's in
`task_graph`); what is found, which is `memory`, what is in it at each time (`alive`), `collectives`
and the findings (`lint`); how it is shown, as `report_tables` and as a `trace`; the `comparison` of
two, with its `comparison_tables`; and the `gate` of a CI job, which fails where a figure has grown.
"""
