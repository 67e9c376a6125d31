"""An OpenAI-compatible server for a kvframe engine."""
