"""Text processing: tokenizer, chat template and detokenizer."""
