"""One file per OpenAI resource."""
