"""From text to meaning and back: tags, prompts, contexts, token ids."""
