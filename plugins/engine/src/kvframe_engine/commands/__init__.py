"""The commands that run a model: generate, chat, embed, trace and top, one file each."""
