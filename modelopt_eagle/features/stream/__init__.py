"""Features streamed from running servers: messages, mailbox, clients, the trainer's source."""
