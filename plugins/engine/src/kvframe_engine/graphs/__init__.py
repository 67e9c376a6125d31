"""Steps as captured graphs: their sizes, capture and replay."""
