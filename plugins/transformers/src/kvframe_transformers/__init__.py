"""Serves Hugging Face checkpoints through kvframe, by transformers' own extension points."""
