"""The page in the browser: server-rendered lists and forms, and one ES module that calls the REST API."""
