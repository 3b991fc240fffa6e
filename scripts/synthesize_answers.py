import sys

from modelopt_eagle.cli.synthesize_answers import main

sys.exit(main())
