"""Text for parts of a conversation that chats do not have: documents, search results, tools that a provider ran."""
