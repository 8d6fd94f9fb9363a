"""Attention by the fastest implementation that serves a device, each held against
`call.reference`.
"""
