from tests.folders import in_an_empty_folder as in_an_empty_folder
