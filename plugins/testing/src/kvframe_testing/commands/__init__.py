"""The commands of plugin authors: check and new-plugin, one file each."""
