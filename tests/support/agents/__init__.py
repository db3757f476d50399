"""What is rolled out: handlers that tests name, and agents in processes of their own."""
