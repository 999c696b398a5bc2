"""Architectures of Hugging Face transformers, built tiny from their configs, split and compared with one device."""
