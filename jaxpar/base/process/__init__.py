"""The process that runs a training: how JAX starts in it (`runtime`), what it does as all others of
its run do (`multihost`), what it gives them beside their programs (`kv_store`), which machine and
which processes there are (`processes`), and how it learns that it is to stop (`early_signals`,
`preemption`, `machine_notice`).
"""
