"""Text to token ids and back. To be read in this order: what a stranger's tokenizer.json may do
(`stranger`), the special tokens that a tokenizer's folder declares (`special_tokens`) and the
tokens that it adds (`added_tokens`), a tokenizer (`tokenizer`), and how many bytes of text stand
for its ids (`text_bytes`).
"""
