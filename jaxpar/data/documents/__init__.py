"""Whole documents, of data sets and of files. To be read in this order: how `datasets` is given
files by their names (`data_set_files`), and one column of JSON as a data set (`json_documents`);
what documents lie in, and how it is opened (`document_sources`); the blocks of documents that the
processes of a run tokenize together (`blocks`), in an order that a checkpoint finds again
(`document_order`); and the documents, tokenized and packed (`tokenized`).
"""
