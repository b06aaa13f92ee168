"""Between text and token ids: messages, chat templates, tokenizer, detokenizer, stop strings, reasoning."""
