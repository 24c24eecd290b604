"""Other forms in which clients ask for answers and read them: each is put as a chat completion."""
