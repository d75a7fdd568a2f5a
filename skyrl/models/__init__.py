"""Loading transformers models and tokenizers, and scoring tokens with them."""
