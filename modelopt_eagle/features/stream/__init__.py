"""Features streamed from running servers: messages, mailbox, client."""
