package find

import (
	"fmt"
	"os"
)

// maxSecret bounds a file of credentials, in bytes.
const maxSecret = 1 << 20

// Credentials looks at the files that environment variables name, before a client reads them: clients wait for the other end of a FIFO
// for ever, and read a device to its end. A file that is not there is left to the client, which knows whether it needs one.
func Credentials(variables ...string) error {
	for _, name := range variables {
		path := os.Getenv(name)
		if path == "" || path == os.DevNull {
			continue
		}
		info, err := os.Stat(path)
		if err != nil {
			continue
		}
		if !info.Mode().IsRegular() {
			return fmt.Errorf("%s: %s is not a regular file: give a file of credentials", name, path)
		}
		if info.Size() > maxSecret {
			return fmt.Errorf("%s: %s has more than %d MiB: give a file of credentials", name, path, maxSecret>>20)
		}
	}
	return nil
}
