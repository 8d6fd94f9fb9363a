"""The step as a task graph: what must wait for what, and what any order of it could reach.

`runs` lays a program out as runs of tasks with what each needs, `paths` finds work, critical path
and slack, `list_schedule` orders the runs on the lanes of a device and checks such orders,
`report` writes all of it down, and `graph_tables` shows it.
"""
