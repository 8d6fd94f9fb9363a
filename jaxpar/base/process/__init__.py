"""The process that runs a training: how its devices and its peers are set up (`runtime`,
`processes`), and how it learns that it is to stop (`early_signals`, `stopping`,
`machine_notice`).
"""
