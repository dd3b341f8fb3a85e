"""Models made of models that were trained apart: cBTM's clusters of documents and their experts."""
