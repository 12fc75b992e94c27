package data

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"

	"github.com/soliton-train/soliton/trainer"
)

// recipe is a line of a manifest that says how samples are made of the files above it, so that workers that make them in another way
// notice.
func recipe(format string, args ...any) trainer.DataFile {
	text := fmt.Sprintf(format, args...)
	sum := sha256.Sum256([]byte(text))
	return trainer.DataFile{Path: text, SHA256: hex.EncodeToString(sum[:])}
}
