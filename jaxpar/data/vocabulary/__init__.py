"""Text to token ids and back. To be read in this order: what a tokenizer.json of a stranger may do
(`stranger`), the special tokens that the folder of a tokenizer declares (`special_tokens`) and the
tokens that it adds (`added_tokens`), a tokenizer (`tokenizer`), and how many bytes of text stand
for its ids (`text_bytes`).
"""
