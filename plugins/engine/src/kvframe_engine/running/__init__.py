"""Running a step: packed tensors through the model, to next tokens or embeddings."""
