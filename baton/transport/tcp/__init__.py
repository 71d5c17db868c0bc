"""Transport between hosts over tcp: owner, reader, the messages between them and their sealing."""
