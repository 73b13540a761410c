"""What a conversation brings that chats have no word for: documents, search results, tools that a provider ran."""
