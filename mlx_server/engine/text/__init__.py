"""Between text and token ids: chat templates, tokenizer, detokenizer, stop strings, reasoning."""
