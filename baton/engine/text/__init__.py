"""Text in and out: tokenizer, chat template and detokenizer."""
