"""The service VM: the image that wipes and checks a used GPU, and the program inside it."""
